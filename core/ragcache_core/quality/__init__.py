"""Quality of blended answers: replayed questions, and the alpha that reaches a wanted quality."""
