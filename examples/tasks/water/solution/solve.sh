echo "No."
