echo "Yes."
