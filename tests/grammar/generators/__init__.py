"""JSON Schemas that seven schema generators wrote. Beside each JSON file is the program that printed it."""
