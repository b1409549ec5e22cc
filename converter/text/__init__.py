"""Text: files become documents, and documents become windows. A run learns from some and is measured on others."""
