"""What is measured while a run trains: time, memory, bytes sent, and the record of it."""
