"""Results on disk: strict JSON, CSV rows and the report page."""
