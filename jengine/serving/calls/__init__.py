"""What all protocols share about a call: its interface, errors, ids, the current model."""
