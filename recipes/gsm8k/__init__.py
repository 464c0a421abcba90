"""Grade-school word problems: GSM8K, or questions like its made here."""
