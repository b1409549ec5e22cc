"""What `benchmarks/fuzz.py` is made of: sound inputs, damage by kind of file, and judges of what came out."""
