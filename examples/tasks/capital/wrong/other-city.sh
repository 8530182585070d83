echo "The capital of France is Lyon."
