"""The gradient noise scale, and a schedule that follows it."""
