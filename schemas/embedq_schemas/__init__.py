"""The contracts: runs, jobs, token batches, vector batches, manifests and errors."""
