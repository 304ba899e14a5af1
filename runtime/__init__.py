"""The machine: schedules, transport, stage execution. The bottom rung: it imports nothing else of dpart."""
