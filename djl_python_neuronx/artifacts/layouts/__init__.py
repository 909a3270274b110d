"""What can lie in a model folder, one module per noun."""
