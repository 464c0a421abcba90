"""The options of single parts and commands, each with its default and its sentence."""
