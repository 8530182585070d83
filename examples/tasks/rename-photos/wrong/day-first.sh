cd photos
for file in IMG_*.jpg; do mv "$file" "${file#IMG_}"; done
