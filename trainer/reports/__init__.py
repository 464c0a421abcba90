"""Reports on a run: findings, samples and the report page."""
