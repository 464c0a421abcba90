"""What a batch is worth: scores from functions and models, their failures, and what the driver does to them."""
