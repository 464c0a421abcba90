"""What the policy wrote, as rows: kept in files, and read back to be scored."""
