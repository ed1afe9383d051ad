-- Admit one request: every limit that bears on it is checked, then all are taken from, or none.
--
-- KEYS  1 epoch  2 tenant  3 live  4 reservation  5 leases  6 refusals
-- ARGV  1 clock offset in ms (0 but in tests)    2 lease in ms      3 request id      4 tenant id     5 key id
--       6 generation                             7 bound, nano-USD  8 bound, tokens   9 end user, or ''
--      10 limits (below)                        11 their counters  12 who: project, key, route
--      13 usage event up to admitted_at         14 and after it    15 life of an idle tenant's counters, ms
--      16 a generation to take back, or ''
-- 10 to 12 are msgpack. Limits are one flat list, eight items each: counter, kind, amount, hard (1 or 0), id, then
--   of a budget: begin and end of its running period in ms, and what to watch: '', or its amount and thresholds in
--   percent, ascending, parted by blanks;
--   of requests and tokens: width of a bucket in ms, 0, ''; of concurrent requests: 0, 0, ''.
-- Replies
--   ADMITTED, now, whether another such request would be refused until this one is settled (1 or 0), then of the
--     tightest limit of requests: amount (-1: none), left, ms until such a request would pass; the same of tokens
--   REFUSED, now, number of the limit, ms until this request would pass (-1: never), left of the limit, then as above
--   STALE, generation known here | STALE_PERIOD, now | EMPTY | REBUILD, numbers of limits... | OPENING, ms | DUPLICATE

local ITEMS = 8

local tenant, id, user = KEYS[2], ARGV[3], ARGV[9]
local now = time(ARGV[1])
local epoch = redis.call('GET', KEYS[1])
if not epoch then
  return { 'EMPTY' }
end
local opening = tonumber(epoch) - now
if opening > 0 and opening < 60000 then -- a longer wait was never meant: the clock was set back
  return { 'OPENING', opening }
end
if redis.call('EXISTS', KEYS[4]) == 1 then
  return { 'DUPLICATE' }
end
local known = redis.call('HGET', tenant, 'generation')
local generation = tonumber(ARGV[6])
if known and tonumber(known) > generation then
  if known ~= ARGV[16] then
    return { 'STALE', tonumber(known) }
  end
  -- What was noted of later generations says nothing of these.
  local settlements = redis.call('HGET', tenant, 'settlements') or '0'
  redis.call('DEL', tenant)
  redis.call('HSET', tenant, 'settlements', settlements)
end

local bound, tokens = tonumber(ARGV[7]), tonumber(ARGV[8])
local limits = cmsgpack.unpack(ARGV[10])
local last = #limits / ITEMS - 1
local counter, key, used, cost, oldest, bucket = {}, {}, {}, {}, {}, {}
local missing = {}

-- Requests or tokens admitted in this bucket and the 60 before it, so that no window's length ever holds more than the
-- limit. Without the shard's epoch in it the counter may lack what came before the shard was emptied; with another
-- limit's id, what came while there was none.
local function read_window(n, width, limit)
  local held = redis.call('HMGET', key[n], 'n', 'oldest', 'epoch', 'limit')
  bucket[n] = math.floor(now / width)
  if held[3] ~= epoch and now - tonumber(epoch) < (BUCKETS + 1) * width or held[1] and held[4] ~= limit then
    missing[#missing + 1] = n
    used[n], oldest[n] = 0, bucket[n]
    return
  end
  local first = bucket[n] - BUCKETS
  used[n] = tonumber(held[1] or '0')
  oldest[n] = math.min(tonumber(held[2] or text(bucket[n])), bucket[n]) -- a clock may be set back
  if oldest[n] >= first then
    return
  end
  if first - oldest[n] > BUCKETS then
    redis.call('DEL', key[n])
    used[n] = 0
    if held[3] then
      redis.call('HSET', key[n], 'epoch', held[3])
    end
  else
    for past = oldest[n], first - 1 do
      local passed = redis.call('HGET', key[n], text(past))
      if passed then
        used[n] = used[n] - tonumber(passed)
        redis.call('HDEL', key[n], text(past))
      end
    end
  end
  oldest[n] = first
  redis.call('HSET', key[n], 'n', text(used[n]), 'oldest', text(first), 'limit', limit)
  redis.call('PEXPIRE', key[n], (BUCKETS + 2) * width)
end

-- Milliseconds until so much of what was counted has left the window.
local function until_left(n, leaving)
  if leaving <= 0 then
    return 0
  end
  local width, fields, gone = limits[n * ITEMS + 6], {}, 0
  for past = oldest[n], bucket[n] do
    fields[#fields + 1] = text(past)
  end
  for index, amount in ipairs(redis.call('HMGET', key[n], unpack(fields))) do
    gone = gone + tonumber(amount or '0')
    if gone >= leaving then
      return (oldest[n] + index + BUCKETS) * width - now
    end
  end
  return (BUCKETS + 1) * width
end

local refused, left
local retry, tight = 0, 0
local function refuse(n, remaining, wait)
  if limits[n * ITEMS + 4] == 0 then
    return -- over it nothing is refused
  end
  if not refused then
    refused, left = n, math.max(0, remaining)
  end
  if wait < 0 or retry < 0 then
    retry = -1
  else
    retry = math.max(retry, wait)
  end
end

-- What a settlement gives back would have to be there for another such request.
local function watch(n, left_behind)
  if left_behind < 0 and limits[n * ITEMS + 4] == 1 then
    tight = 1
  end
end

for n = 0, last do
  local at = n * ITEMS
  local kind, amount = limits[at + 2], limits[at + 3]
  counter[n] = named(limits[at + 1], user)
  key[n] = tenant .. ':' .. counter[n]
  if kind == 'b' then
    -- A period once begun lasts to its end, so that a change of zone begins with the next.
    local held = redis.call('HMGET', key[n], 'start', 'end', 'spent', 'reserved', 'watch', 'limit')
    if not holds(held, now) or held[6] ~= limits[at + 5] then
      if now < limits[at + 6] or now >= limits[at + 7] then
        return { 'STALE_PERIOD', now }
      end
      missing[#missing + 1] = n
    else
      local spent, reserved = tonumber(held[3]), tonumber(held[4])
      used[n] = (held[5] or '') ~= limits[at + 8] -- whether what is watched has changed
      if bound > 0 and spent + reserved + bound > amount then
        local wait
        if bound > amount then
          wait = -1
        elseif spent + bound <= amount then
          wait = 1000 -- what is reserved may come free any moment
        else
          wait = counter[n]:sub(1, 8) == 'b:total:' and -1 or tonumber(held[2]) - now
        end
        refuse(n, amount - spent - reserved, wait)
      end
      watch(n, bound > 0 and amount - spent - reserved - 2 * bound or 0)
    end
  elseif kind == 'c' then
    if counter[n] == 'c::tenant:' then
      key[n] = KEYS[3]
    elseif redis.call('HGET', tenant, limits[at + 1]) ~= limits[at + 5] then
      missing[#missing + 1] = n
    end
    -- A lease that ran out holds its slot until the janitor has settled it: Redis may have been away so long, and the
    -- request still run.
    used[n] = redis.call('ZCARD', key[n])
    if used[n] + 1 > amount then
      refuse(n, 0, amount < 1 and -1 or 1000)
    end
    watch(n, amount - used[n] - 2)
  else
    cost[n] = kind == 'r' and 1 or tokens
    read_window(n, limits[at + 6], limits[at + 5])
    if used[n] + cost[n] > amount or amount < 1 then
      refuse(n, amount - used[n], (cost[n] > amount or amount < 1) and -1 or until_left(n, used[n] + cost[n] - amount))
    end
    watch(n, kind == 't' and amount - used[n] - 2 * cost[n] or 0)
  end
end
if #missing > 0 then
  return { 'REBUILD', unpack(missing) }
end

if refused then
  local quarter = math.floor(now / 900000) * 900
  local reason = ({ b = 'budget', r = 'requests', t = 'tokens', c = 'concurrent' })[limits[refused * ITEMS + 2]]
  redis.call('HINCRBY', KEYS[6], ARGV[4] .. '|' .. ARGV[5] .. '|' .. reason .. '|' .. text(quarter), 1)
else
  redis.call('HSET', tenant, 'generation', text(generation))
  redis.call('PEXPIRE', tenant, ARGV[15])
  local expiry = text(now + tonumber(ARGV[2]))
  for n = 0, last do
    local at = n * ITEMS
    local kind = limits[at + 2]
    if kind == 'b' then
      redis.call('HINCRBY', key[n], 'reserved', text(bound))
      if used[n] then
        if limits[at + 8] == '' then
          redis.call('HDEL', key[n], 'watch')
        else
          redis.call('HSET', key[n], 'watch', limits[at + 8])
        end
      end
    elseif kind == 'c' then
      if key[n] ~= KEYS[3] then
        take_slot(tenant, counter[n], id, expiry)
      end
    else
      local life = (BUCKETS + 2) * limits[at + 6]
      used[n] = used[n] + cost[n]
      redis.call('HSET', key[n], 'n', text(used[n]), 'oldest', text(oldest[n]), 'limit', limits[at + 5])
      if redis.call('HINCRBY', key[n], text(bucket[n]), text(cost[n])) == cost[n] then -- the bucket's first
        redis.call('PEXPIRE', key[n], life)
        remember(tenant, counter[n], now, life)
      end
    end
  end
  redis.call('ZADD', KEYS[3], expiry, id)
  redis.call('ZADD', KEYS[5], expiry, id)
  redis.call('HSET', KEYS[4], 'state', 'open', 'tenant', ARGV[4], 'admitted', text(now), 'bound', ARGV[7],
    'tokens', ARGV[8], 'counters', ARGV[11], 'who', ARGV[12], 'user', user, 'charged', '0', 'used', '0',
    'event', ARGV[13] .. iso(now) .. ARGV[14])
end

local reply = refused and { 'REFUSED', now, refused, retry, left } or { 'ADMITTED', now, tight }
for _, kind in ipairs({ 'r', 't' }) do
  local amount, remaining, reset = -1, 0, 0
  for n = 0, last do
    local at = n * ITEMS
    if limits[at + 2] == kind and limits[at + 4] == 1 then
      local free = math.max(0, limits[at + 3] - used[n])
      if amount < 0 or free <= remaining then
        local wait = until_left(n, math.min(used[n], used[n] + cost[n] - limits[at + 3]))
        if amount < 0 or free < remaining or wait > reset then
          amount, remaining, reset = limits[at + 3], free, wait
        end
      end
    end
  end
  reply[#reply + 1] = amount
  reply[#reply + 1] = remaining
  reply[#reply + 1] = reset
end
return reply
