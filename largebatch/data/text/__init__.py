"""Text: windows of consecutive words, in which every next word is predicted."""
