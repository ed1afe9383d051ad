-- From now on nothing is written of requests that were admitted until now: of the tenant (''), of one end user, or of
-- the one request.
--
-- ARGV  3 whose  4 how long requests may still come that were admitted before, ms

redis.call('SET', prefix .. 'x:' .. ARGV[3], text(now), 'PX', ARGV[4])
