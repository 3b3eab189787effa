"""Running over files: workers, structure checks, fingerprints, sealing, verifying, comparing."""
