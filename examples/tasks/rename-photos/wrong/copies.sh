cd photos
cp IMG_17-02-2020.jpg 2020-02-17.jpg
cp IMG_03-11-2021.jpg 2021-11-03.jpg
cp IMG_28-12-2021.jpg 2021-12-28.jpg
