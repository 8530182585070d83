# Succeeds when the folder holds exactly the renamed files, each with its own contents, and the notes.
set -e
test "$(ls photos | tr '\n' ' ')" = "2020-02-17.jpg 2021-11-03.jpg 2021-12-28.jpg IMG_notes.txt "
grep -qx 'photo of 17-02-2020' photos/2020-02-17.jpg
grep -qx 'photo of 03-11-2021' photos/2021-11-03.jpg
grep -qx 'photo of 28-12-2021' photos/2021-12-28.jpg
grep -qx 'no photo' photos/IMG_notes.txt
