grep -c . poem.txt > count.txt
