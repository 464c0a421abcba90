"""A run read for people: findings, samples, pages."""
