"""Values that every room passes around: dtypes, boxes, the index, problems, errors. No torch, no disk."""
