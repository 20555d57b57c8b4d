"""The ampwatch server: batches in, series, findings and pages out."""
