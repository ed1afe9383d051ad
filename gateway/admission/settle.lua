-- Settle one request: release what it has reserved and its slots, charge what it cost, append its usage event. Once.
--
-- KEYS  1 tenant  2 live  3 reservation  4 leases  5 usage stream  6 alerts  7 epoch
-- ARGV  1 clock offset in ms  2 request id  3 tenant id  4 admitted at, ms  5 charged, nano-USD  6 tokens used
--       7 usage event (JSON; '' to withdraw)  8 give the request back to its windows (0 or 1)
--       9 life of the tombstone, ms  10 counters  11 end user, or ''; 10 and 11 as the admission had them
-- Replies
--   SETTLED, revision | WITHDRAWN | DUPLICATE
--
-- What is left of the reservation is a tombstone: a second settlement changes nothing, except the first one after the
-- janitor's, which replaces it (revision 2) and brings the difference. A withdrawal, after an admission whose answer
-- was never seen, leaves no event, and its tombstone keeps that admission out if it arrives later.
--
-- Without a reservation Redis was emptied since the admission, or was away at it. A counter may then have been built
-- from a ledger that has this event already, so it is given up, and the next admission builds it anew; the event says
-- `again`, for those who are building at this moment. Whether the janitor settled it before Redis was emptied nobody
-- knows any more; so that this is what stays in the ledger, it is revision 2.

local id, event = ARGV[2], ARGV[7]
local charged, used, now = tonumber(ARGV[5]), tonumber(ARGV[6]), time(ARGV[1])
local held = redis.call('HMGET', KEYS[3], 'state', 'by', 'admitted', 'bound', 'tokens', 'charged', 'used', 'counters',
  'user', 'restored')
local state = held[1]
if state == 'withdrawn' and event ~= '' then
  state = false -- served unreserved, while Redis was away
end
if state and state ~= 'open' and not (state == 'settled' and held[2] == 'janitor' and event ~= '') then
  return { 'DUPLICATE' }
end

local back = ARGV[8] == '1' and -1 or 0
if state then
  local request = { admitted = tonumber(held[3]), counters = held[8], user = held[9] }
  local by
  if state == 'open' then
    by = { spent = charged, reserved = 0 - tonumber(held[4]), tokens = used - tonumber(held[5]), requests = back }
  else
    by = { spent = charged - tonumber(held[6]), reserved = 0, tokens = used - tonumber(held[7]), requests = back }
  end
  change(KEYS[1], ARGV[3], id, request, by, KEYS[6], now)
  if held[3] ~= ARGV[4] and event ~= '' then -- Redis admitted it, but its answer came too late to be heard
    event = event:gsub('"admitted_at":"[^"]*"', '"admitted_at":"' .. iso(request.admitted) .. '"', 1)
  end
elseif event ~= '' then
  local epoch = tonumber(redis.call('GET', KEYS[7]) or text(now))
  local admitted = tonumber(ARGV[4])
  for _, counter in ipairs(listed(ARGV[10])) do
    counter = named(counter, ARGV[11])
    local key = KEYS[1] .. ':' .. counter
    local kind, window = parts(counter)
    if kind == 'b' then
      if holds(redis.call('HMGET', key, 'start', 'end'), admitted) then
        redis.call('DEL', key)
      end
    elseif kind == 'c' then
      free_slot(KEYS[1], counter, id)
    elseif now - epoch < (BUCKETS + 1) * WIDTH[window] then
      redis.call('HDEL', key, 'epoch')
    else
      put(KEYS[1], counter, WIDTH[window], admitted, kind == 'r' and 1 + back or used, now)
    end
  end
end

redis.call('ZREM', KEYS[2], id)
redis.call('ZREM', KEYS[4], id)
redis.call('DEL', KEYS[3])
if event == '' then
  redis.call('HSET', KEYS[3], 'state', 'withdrawn')
  redis.call('PEXPIRE', KEYS[3], ARGV[9])
  return { 'WITHDRAWN' }
end
local revision = state == 'open' and not held[10] and 1 or 2
redis.call('HINCRBY', KEYS[1], 'settlements', 1)
redis.call('XADD', KEYS[5], '*', 'event', event, 'revision', text(revision), unpack(state and {} or { 'again', '1' }))
redis.call('HSET', KEYS[3], 'state', 'settled', 'by', 'gateway')
redis.call('PEXPIRE', KEYS[3], ARGV[9])
return { 'SETTLED', revision }
