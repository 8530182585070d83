echo "The capital of France is Paris."
