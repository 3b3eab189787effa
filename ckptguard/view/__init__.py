"""One checkpoint view that every node agrees on: what each node has and needs, agreement, staging, publishing."""
