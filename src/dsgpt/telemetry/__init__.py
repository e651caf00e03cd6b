"""What is measured while a run trains: time, memory, bytes sent."""
