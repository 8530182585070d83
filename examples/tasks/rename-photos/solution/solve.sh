cd photos
for file in IMG_*-*-*.jpg; do
    date=${file#IMG_}; date=${date%.jpg}
    year=${date##*-}; day=${date%%-*}; rest=${date#*-}; month=${rest%-*}
    mv "$file" "$year-$month-$day.jpg"
done
