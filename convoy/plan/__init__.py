"""What each layer does on which devices, as a value, and the steps and device programs that follow from it."""
