"""What is timed: the loop, the clock that alone defines training time, and the time and loss of each step."""
