"""What healing minimises, one loss a file."""

from converter.healing.losses.head import Head, HeadLosses, LossWeights, head_losses
from converter.healing.losses.hidden_states import hidden_state_loss
from converter.healing.losses.kl import Top

__all__ = ["Head", "HeadLosses", "LossWeights", "Top", "head_losses", "hidden_state_loss"]
