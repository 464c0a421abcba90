"""REINFORCE++ (2501.03262) on the common task."""
