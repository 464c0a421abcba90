"""An agent learns to push a box onto its target."""
