"""Which setting: what each one changes, its transfer between recipes, and the page."""
