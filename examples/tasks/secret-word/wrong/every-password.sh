grep -rh 'password:' archive | cut -d ' ' -f 2 > found.txt
