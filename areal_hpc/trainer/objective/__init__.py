"""What a batch is trained towards: advantages, importance weights and the loss."""
