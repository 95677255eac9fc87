"""The harness: draws problems, runs subjects, judges what they do, keeps what it found."""
