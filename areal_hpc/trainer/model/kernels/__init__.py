"""Operations of a layer that keep little memory for the backward pass."""
