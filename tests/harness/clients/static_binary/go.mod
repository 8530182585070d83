module staticclient

go 1.27
