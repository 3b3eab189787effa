"""Digests: fingerprints of tensor content that no layout changes, and manifests of the bytes on disk."""
