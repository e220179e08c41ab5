"""Values that several ranks hold, compared and sent."""
