echo "Yes and no."
