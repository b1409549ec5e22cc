"""Healing: a short fine-tune that learns back what a conversion took."""
