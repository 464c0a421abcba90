"""An agent learns to cross a frozen lake."""
