"""What quantizing each part of a model alone costs, and the recipe that spends a budget on the parts that cost most."""
