"""One conversion: a recipe becomes a plan, the plan becomes a walk, and the walk writes a checkpoint and its report."""
