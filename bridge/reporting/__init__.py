"""Stage 7: make the report from values: tables, HTML page, model card."""
