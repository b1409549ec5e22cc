"""What is measured: one model against another, a model on text, and what a checkpoint is or what is wrong with it."""
