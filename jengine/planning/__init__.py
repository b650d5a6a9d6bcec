"""What a model will take and give on a device, before there is one: memory, sequences, and the speed that the hardware allows."""
